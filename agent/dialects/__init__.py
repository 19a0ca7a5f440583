"""Call syntaxes: how a model writes a tool call as text."""
