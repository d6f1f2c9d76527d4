"""The peer of `bench prefix-cache`: a paged prefix cache in plain Python, the way one writes it first.

Block objects in a doubly linked free list, a dict from hash to block, chained sha256_cbor hashes (hashlib + cbor2), vLLM
V1's rules: hits in chain order without the last block, append-only tables, eviction on allocation, release tail first,
hashed blocks to the back. With `window`: a second group of sliding-window attention over the same blocks, looked up from
the right. With `events`: one record per stored range and per removed block, drained at the end of each request.

Reads one JSON object a line: {"blocks", "blockTokens", "requestTokens", "window", "events", "seed"}; answers one:
microseconds per block and case. Written for this project.
"""

import hashlib
import json
import sys
import time

import cbor2


class Block:
    __slots__ = ("id", "refs", "hash", "prev", "next")

    def __init__(self, number):
        self.id = number
        self.refs = 0
        self.hash = None
        self.prev = None
        self.next = None


class FreeList:
    def __init__(self, blocks):
        self.head, self.tail = Block(-1), Block(-1)
        self.head.next, self.tail.prev = self.tail, self.head
        self.count = 0
        for block in blocks:
            self.append(block)

    def append(self, block):
        self._link(block, self.tail.prev, self.tail)

    def prepend(self, block):
        self._link(block, self.head, self.head.next)

    def _link(self, block, before, after):
        before.next = after.prev = block
        block.prev, block.next = before, after
        self.count += 1

    def remove(self, block):
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.count -= 1

    def pop(self):
        block = self.head.next
        self.remove(block)
        return block


class Pool:
    def __init__(self, count, events):
        self.blocks = [Block(i) for i in range(count)]
        self.null = self.blocks[0]
        self.free = FreeList(self.blocks[1:])
        self.index = {}
        self.events = [] if events else None

    def allocate(self, count):
        taken = []
        for _ in range(count):
            block = self.free.pop()
            if block.hash is not None:
                del self.index[block.hash]
                if self.events is not None:
                    self.events.append(("BlockRemoved", [block.hash[:-1]], "GPU"))
                block.hash = None
            block.refs = 1
            taken.append(block)
        return taken

    def touch(self, blocks):
        for block in blocks:
            if block.refs == 0 and block is not self.null:
                self.free.remove(block)
            block.refs += 1

    def release(self, blocks):
        fresh = []
        for block in blocks:
            block.refs -= 1
            if block.refs == 0 and block is not self.null:
                if block.hash is None:
                    fresh.append(block)
                else:
                    self.free.append(block)
        for block in reversed(fresh):
            self.free.prepend(block)

    def store(self, blocks, hashes, tokens, first, size, group, keep):
        stored = []
        for at, block in enumerate(blocks):
            if block is self.null or (keep is not None and not keep(first + at)):
                continue
            key = hashes[first + at] + group
            if key not in self.index:
                block.hash = key
                self.index[key] = block
            stored.append(hashes[first + at])
        if self.events is not None:
            parent = hashes[first - 1] if first else None
            self.events.append(
                ("BlockStored", stored, parent, tokens[first * size : (first + len(blocks)) * size], size, None, "GPU")
            )

    def find(self, key):
        return self.index.get(key)


class FullGroup:
    group = b"\0"

    def __init__(self, pool, size):
        self.pool, self.size, self.tables = pool, size, {}

    def lookup(self, hashes, limit):
        found = []
        for at in range(limit):
            block = self.pool.find(hashes[at] + self.group)
            if block is None:
                break
            found.append(block)
        return found

    def keep(self, count):
        return None

    def start(self, request, hit):
        self.pool.touch(hit)
        self.tables[request] = list(hit)

    def grow(self, request, count, hashes, tokens):
        table = self.tables[request]
        first = len(table)
        table.extend(self.pool.allocate(count - first))
        self.pool.store(table[first:count], hashes, tokens, first, self.size, self.group, self.keep(count))

    def finish(self, request):
        self.pool.release(self.tables.pop(request)[::-1])


class WindowGroup(FullGroup):
    group = b"\1"

    def __init__(self, pool, size, window):
        super().__init__(pool, size)
        self.need = -(-(window - 1) // size)

    def lookup(self, hashes, limit):
        found, run = [self.pool.null] * limit, 0
        for at in range(limit - 1, -1, -1):
            block = self.pool.find(hashes[at] + self.group)
            if block is None:
                run = 0
                continue
            found[at] = block
            run += 1
            if run == self.need:
                return found[: at + run]
        return found[:run]

    def keep(self, count):
        return lambda at: at >= count - 1 - self.need


def chain(tokens, size):
    parent = hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()
    hashes = []
    for at in range(0, len(tokens) - size + 1, size):
        parent = hashlib.sha256(cbor2.dumps((parent, tuple(tokens[at : at + size]), None), canonical=True)).digest()
        hashes.append(parent)
    return hashes


class Manager:
    def __init__(self, ask):
        self.pool = Pool(ask["blocks"], ask["events"])
        size = ask["blockTokens"]
        self.groups = [FullGroup(self.pool, size)]
        if ask["window"]:
            self.groups.append(WindowGroup(self.pool, size, ask["window"]))

    def lookup(self, hashes, limit):
        hits = [self.groups[0].lookup(hashes, limit)]
        for group in self.groups[1:]:
            hits.append(group.lookup(hashes, len(hits[0])))
        shortest = min(map(len, hits))
        return [hit[:shortest] for hit in hits]

    def run(self, request, hit, hashes, tokens):
        for group, blocks in zip(self.groups, hit):
            group.start(request, blocks)
        for group in self.groups:
            group.grow(request, len(hashes), hashes, tokens)

    def finish(self, request):
        for group in self.groups:
            group.finish(request)

    def drain(self):
        if self.pool.events is not None:
            self.pool.events = []


def prompt(count, seed):
    tokens = []
    state = seed & 0xFFFFFFFF
    for _ in range(count):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        tokens.append((state >> 8) % 128_000)
    return tokens


def measure(ask):
    clock = time.perf_counter_ns
    size, length = ask["blockTokens"], ask["requestTokens"]
    blocks = length // size
    manager = Manager(ask)
    spent = {"hash": [], "cold": [], "warm": [], "unused": [], "evicting": [], "free": []}
    fills = ask["blocks"] // (blocks * len(manager.groups))
    for turn in range(fills + 1 + ask["turns"]):
        tokens = prompt(length, ask["seed"] + turn)
        start = clock()
        hashes = chain(tokens, size)
        hashed = clock()
        hit = manager.lookup(hashes, blocks - 1)
        looked = clock()
        manager.run(turn, hit, hashes, tokens)
        ran = clock()
        manager.finish(turn)
        freed = clock()
        again = manager.lookup(hashes, blocks - 1)
        end = clock()
        assert len(hit[0]) == 0 and len(again[0]) == blocks - 1, (len(hit[0]), len(again[0]))
        manager.drain()
        spent["hash"].append(hashed - start)
        spent["cold"].append(looked - hashed)
        if turn != fills:
            spent["unused" if turn < fills else "evicting"].append(ran - looked)
        spent["free"].append(freed - ran)
        spent["warm"].append(end - freed)
    middle = lambda values: sorted(values)[len(values) // 2] / blocks / 1000
    return {name: middle(values) for name, values in spent.items()} | {"last": hashes[-1].hex()}


def main():
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
