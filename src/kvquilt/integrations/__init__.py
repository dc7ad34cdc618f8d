"""Documents of other frameworks, after retrieval, to a kvquilt server; one file and one extra for each."""
