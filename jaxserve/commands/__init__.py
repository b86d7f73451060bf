"""The command `jaxserve`, and its subcommands that belong to no other package."""
