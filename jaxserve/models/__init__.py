"""Model families: configs, parameters as pytrees, and pure functions over them."""
