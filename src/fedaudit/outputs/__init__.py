"""What programs read of a finished audit: SARIF, JUnit, a Markdown summary, and the comparison of two audits."""
