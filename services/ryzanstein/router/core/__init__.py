"""The core behind the faces: admission, session turns, generations, other routers.

A session has one turn at a time.
"""
