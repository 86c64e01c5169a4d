"""The operator in other people's models, one module a library. Each imports its library, so none is imported here."""
