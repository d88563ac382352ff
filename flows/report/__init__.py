"""Results of a run: the table in the terminal, the HTML report, the artifacts in Prefect."""
