"""Routes in the shape of Ollama's API: `add_ollama_routes` in routes.py."""
