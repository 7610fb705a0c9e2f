"""Conversations that the router keeps: values and the store's role (`store`), two stores (`memory`, `sqlite`), and what a
request does with its session (`turn`)."""
