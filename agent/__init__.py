"""The coding agent: models, chat, protocols, tools and the loop. Uses `tasks` and `cache`."""
