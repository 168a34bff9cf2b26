"""Federations of other frameworks, audited: a package a framework, the only one that imports it; imported when used."""
