"""All that is written for readers and programs: page, notebook, terminal, SARIF, JUnit, Markdown; audits compared."""
