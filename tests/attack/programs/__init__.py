"""The attacks; each has `async def attack(target)`, which counts what it has done and goes on until cancelled."""
