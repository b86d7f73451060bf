"""The HTTP frontend, in the shape of OpenAI's API: `build_app` in app.py, `HttpServer`."""
