"""The lab of jaxserve: experiments, benches and compile checks, which nobody needs who serves."""
