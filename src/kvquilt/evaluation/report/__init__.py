"""Runs as people read them: a page and a summary in Markdown, made from the folders of runs alone."""
