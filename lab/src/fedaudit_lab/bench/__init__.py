"""How fast fedaudit is, and its peers; every figure in docs/evidence/performance.md comes from this package."""
