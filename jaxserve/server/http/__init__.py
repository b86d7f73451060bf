"""The HTTP door, in the shape of OpenAI's API: `build_app` in app.py, `HttpServer` in
http_server.py."""
