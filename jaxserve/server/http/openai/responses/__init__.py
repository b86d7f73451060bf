"""Routes in the shape of OpenAI's Responses API: `add_response_routes` in routes.py."""
