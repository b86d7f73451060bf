"""The lab of jaxserve: experiments, benches and compile checks, not needed for serving."""
