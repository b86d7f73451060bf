"""Routes in the shape of Anthropic's Messages API: `add_message_routes` in routes.py."""
