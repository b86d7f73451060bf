"""Tests of products with weights."""
