"""Makes the measured table of docs/exactness.md: chats alone and in company, bit by bit."""
