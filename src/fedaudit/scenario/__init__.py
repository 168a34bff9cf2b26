"""What to audit: the specifications of a scenario, the threat model, and YAML."""
