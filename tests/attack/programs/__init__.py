"""The attacks; each has `async def attack(target)`, which says when it begins and goes on until it is cancelled.

It counts what it has done.
"""
