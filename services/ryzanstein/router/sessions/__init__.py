"""Conversations that the router keeps.

`store` has the values and the interface of a store, `stores` the implementations (in memory, in
SQLite, in Redis), and `turn` what a request does with its session.
"""
