"""How fast fedaudit is, here and beside its peers; every figure in docs/performance.md comes from this package."""
