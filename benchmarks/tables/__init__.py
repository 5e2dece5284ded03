"""The tables of README.md and docs/, one function a table: records in, lines of Markdown out."""
