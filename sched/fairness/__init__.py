"""Weighted fair sharing between tenants."""
