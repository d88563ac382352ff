"""What a run found: the table in the terminal and the HTML report."""
