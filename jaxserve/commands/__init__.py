"""The command `jaxserve`, and those of its subcommands that belong to no other package."""
