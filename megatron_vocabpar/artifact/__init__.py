"""The paper's experiments: launch lines from a table, what their logs say, and what was published."""
