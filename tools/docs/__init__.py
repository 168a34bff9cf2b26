"""The documentation: what its pages hold, those that are made from the code, and the site that is built of them."""
