"""``fastdecode doctor``: whether a node or the ranks of a job are set up well."""
