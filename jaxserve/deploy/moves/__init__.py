"""Answers that go on at another replica, as the ingress and its replicas see it."""
