"""Conversations: messages, chat templates and the sandbox that they run in, and which tokens are learned."""
