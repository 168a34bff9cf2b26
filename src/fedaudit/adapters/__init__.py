"""Federations of other frameworks, audited: a package a framework, the only one that imports it; imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.distributions import moved

if not TYPE_CHECKING:
    __getattr__ = moved(__name__)
