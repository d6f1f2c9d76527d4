"""The other side of KV events, in plain Python: a consumer and a publisher after vLLM's protocol, with msgpack and pyzmq.

read PUB REPLAY COUNT     follow the stream until COUNT batches came in a row, have all before them replayed, print all as JSON
write PUB REPLAY ANSWERS  publish in the encoding from before June 2026 until killed; every other batch is only for replay;
                          ANSWERS says whether replayed batches carry their topic
"""

import json
import sys
import time

import msgpack
import zmq

END = b"\xff" * 8
DEADLINE_MS = 30_000


def receive(socket):
    if not socket.poll(DEADLINE_MS):
        sys.exit("nothing came in time")
    return socket.recv_multipart()


def described(topic, seq, payload):
    ts, events, rank = msgpack.unpackb(payload)
    for event in events:
        if "block_hashes" in event:
            event["block_hashes"] = [str(one) for one in event["block_hashes"]]
        if event.get("parent_block_hash") is not None:
            event["parent_block_hash"] = str(event["parent_block_hash"])
    return {"topic": topic.decode(), "seq": seq, "ts": ts, "rank": rank, "events": events}


def read(context, pub, replay, count):
    stream = context.socket(zmq.SUB)
    stream.connect(pub)
    stream.setsockopt(zmq.SUBSCRIBE, b"kv")
    live = []
    for _ in range(count):
        topic, seq, payload = receive(stream)
        live.append(described(topic, int.from_bytes(seq, "big"), payload))
    request = context.socket(zmq.DEALER)
    request.connect(replay)
    request.send_multipart([b"", (0).to_bytes(8, "big")])
    batches = []
    while True:
        empty, topic, seq, payload = receive(request)
        assert empty == b""
        if seq == END:
            assert (topic, payload) == (b"", b"")
            break
        batches.append(described(topic, int.from_bytes(seq, "big"), payload))
    # What was replayed is what was sent.
    first = live[0]["seq"]
    assert batches[first : first + count] == live, (first, len(batches))
    print(json.dumps(batches))


def write(context, pub, replay, answers):
    out = context.socket(zmq.PUB)
    out.bind(pub)
    requests = context.socket(zmq.ROUTER)
    requests.bind(replay)
    stored = ["BlockStored", [2**63, 5], None, [1, 2, 3, 4], 2, 7, "GPU"]
    buffer = []
    while True:
        seq = len(buffer)
        payload = msgpack.packb([time.time(), [stored, ["BlockRemoved", [5], "GPU"]], 2])
        buffer.append(payload)
        if seq % 2 == 1:
            out.send_multipart([b"py", seq.to_bytes(8, "big"), payload])
        if requests.poll(5):
            client, empty, start = requests.recv_multipart()
            head = [b"py"] if answers == "topic" else []
            for i in range(int.from_bytes(start, "big"), len(buffer)):
                requests.send_multipart([client, b"", *head, i.to_bytes(8, "big"), buffer[i]])
            requests.send_multipart([client, b"", *(b"" for _ in head), END, b""])


if __name__ == "__main__":
    what, pub_at, replay_at, argument = sys.argv[1:]
    zmq_context = zmq.Context()
    if what == "read":
        read(zmq_context, pub_at, replay_at, int(argument))
        zmq_context.destroy(linger=0)
    else:
        write(zmq_context, pub_at, replay_at, argument)
