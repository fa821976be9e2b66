#!/usr/bin/env python3
"""Reads GGUF files and computes their digests a second time, from docs/formats.md, and compares with engram-model.

usage: hash_digest_test.py ENGRAM_MODEL TEST_DATA
"""
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BLOCKS = {0: (1, 4), 1: (1, 2), 8: (32, 34), 10: (256, 84), 30: (1, 2)}  # type: (values, bytes)
NAMES = {0: "F32", 1: "F16", 8: "Q8_0", 10: "Q2_K", 30: "BF16"}


class Gguf:
    def __init__(self, path):
        with open(path, "rb") as file:
            self.bytes = file.read()
        self.at = 24
        magic, _, tensors, keys = struct.unpack_from("<4sIQQ", self.bytes)
        assert magic == b"GGUF"
        self.keys = {}
        for _ in range(keys):
            key = self.text()
            self.keys[key] = self.value(self.scalar("I"))
        found = []
        for _ in range(tensors):
            name = self.text()
            ne = [self.scalar("Q") for _ in range(self.scalar("I"))]
            found.append((name, ne, self.scalar("I"), self.scalar("Q")))
        alignment = self.keys.get("general.alignment", 32)
        if any(offset % alignment for _, _, _, offset in found):
            alignment = 32
        data = -(-self.at // alignment) * alignment
        self.tensors = {}
        for name, ne, kind, offset in found:
            count = 1
            for n in ne:
                count *= n
            values, size = BLOCKS[kind]
            begin = data + offset
            self.tensors[name] = (kind, ne, self.bytes[begin:begin + count // values * size])

    def scalar(self, code):
        value = struct.unpack_from("<" + code, self.bytes, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def text(self):
        length = self.scalar("Q")
        self.at += length
        return self.bytes[self.at - length:self.at].decode()

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            element, count = self.scalar("I"), self.scalar("Q")
            return [self.value(element) for _ in range(count)]
        return self.scalar(SCALARS[kind])


def i64(*values):
    return struct.pack("<%dq" % len(values), *values)


def digests(paths):
    files = [Gguf(path) for path in paths]
    keys, tensors = files[0].keys, {}
    for file in files:
        tensors.update(file.tensors)
    engram = {k[len("deepseek41.engram."):]: v for k, v in keys.items() if k.startswith("deepseek41.engram.")}
    layers, token_map = engram["layer_ids"], engram["token_map"]
    compressed = engram.get("compressed_vocab_size", max(token_map) + 1)
    text = b"engram.hash_digest.v1\n"
    text += i64(len(layers), engram["max_ngram_size"], engram["head_count"], engram["key_length"], len(token_map),
                compressed, engram["pad_id"])
    text += i64(*layers) + struct.pack("<%di" % len(token_map), *token_map)
    text += i64(*engram["multipliers"]) + i64(*engram["primes"]) + i64(*engram["offsets"])
    hash_digest = hashlib.sha256(text).digest()

    text = b"engram.config_digest.v1\n" + hash_digest
    text += i64(keys["deepseek41.embedding_length"], keys["deepseek41.hyper_connection.count"])
    text += struct.pack("<f", keys["deepseek41.attention.layer_norm_rms_epsilon"])
    for layer in layers:
        kind, ne, _ = tensors["blk.%d.engram_embd.weight" % layer]
        text += i64(layer) + struct.pack("<I", kind) + i64(ne[1])
        for name in ("wkv", "q", "k"):
            kind, _, raw = tensors["blk.%d.engram_%s.weight" % (layer, name)]
            text += struct.pack("<I", kind) + hashlib.sha256(raw).digest()
    return hash_digest.hex(), hashlib.sha256(text).hexdigest(), keys, tensors


# As printed in docs/formats.md.
KNOWN = {
    "tiny": ("60461cddeb00d430e4ea3f6ad682ec27477627cee51615182ff2bbc181ceefc4",
             "b47e80ddcb29a288004951739ae658dbf02813b3a273b55d727a4a231ad91276"),
    "split": ("9fdd8ed8151cde5de39c028479d5268a722d8b2b36e9bcf3834f023a1a3c02bf",
              "ab9e36d085d98c9fd8f217946d7c05dcede4dce41f6942f076dc0c34c809782e"),
}


def main(tool, data):
    with tempfile.TemporaryDirectory() as folder:
        synth = os.path.join(folder, "synth.gguf")
        subprocess.run([tool, "synth", "--out", synth, "--dead-tokens", "7", "--wkv-type", "q8_0", "--qk-type", "f16",
                        "--dim", "48", "--split", "2"], check=True, stdout=subprocess.DEVNULL)
        cases = {
            "tiny": [os.path.join(data, "tiny/tiny.gguf")],
            "split": [os.path.join(data, "split/split-0000%d-of-00002.gguf" % i) for i in (1, 2)],
            "synth": [os.path.join(folder, "synth-0000%d-of-00002.gguf" % i) for i in (1, 2)],
        }
        for name, paths in cases.items():
            hash_digest, config_digest, keys, tensors = digests(paths)
            seen = json.loads(subprocess.run([tool, "inspect", paths[0], "--json"], check=True,
                                             stdout=subprocess.PIPE).stdout)
            assert seen["hash_digest"] == hash_digest, (name, seen["hash_digest"], hash_digest)
            assert seen["config_digest"] == config_digest, (name, seen["config_digest"], config_digest)
            assert KNOWN.get(name, (hash_digest, config_digest)) == (hash_digest, config_digest), name
            assert seen["files"] == paths
            assert seen["geometry"]["dim"] == keys["deepseek41.embedding_length"]
            assert seen["geometry"]["vocab"] == len(keys["deepseek41.engram.token_map"])
            assert sum((layer["primes"] for layer in seen["layers"]), []) == keys["deepseek41.engram.primes"]
            for layer in seen["layers"]:
                for part in ("table", "wkv", "q", "k"):
                    kind, ne, raw = tensors[layer[part]["name"]]
                    assert (layer[part]["type"], layer[part]["shape"]) == (NAMES[kind], ne)
                    with open(layer[part]["file"], "rb") as file:
                        file.seek(layer[part]["offset"])
                        assert file.read(layer[part]["bytes"]) == raw, layer[part]["name"]
            assert subprocess.run([tool, "inspect", paths[0]], stdout=subprocess.DEVNULL).returncode == 0
            print(name, hash_digest, config_digest)

        refused = subprocess.run([tool, "inspect", os.path.join(data, "ds4/ds4.gguf")], capture_output=True, text=True)
        assert refused.returncode == 2 and refused.stdout == "" and refused.stderr.count("\n") == 1, refused
        for wrong in (["inspect"], ["inspect", "x", "--no-such-flag"], ["synth"], [], ["synth", "--out", "/", "--hc", "9"]):
            failed = subprocess.run([tool] + wrong, capture_output=True, text=True)
            assert failed.returncode == 2 and failed.stderr != "", (wrong, failed)
        twin = subprocess.run([tool, "synth", "--out", os.path.join(folder, "env.gguf")], check=True,
                              capture_output=True, env={**os.environ, "ENGRAM_MODEL_SYNTH_DIM": "80",
                                                        "ENGRAM_MODEL_SYNTH_PRESET": "tiny"})
        assert twin.returncode == 0
        seen = json.loads(subprocess.run([tool, "inspect", os.path.join(folder, "env.gguf"), "--json"], check=True,
                                         stdout=subprocess.PIPE).stdout)
        assert seen["geometry"]["dim"] == 80, "a flag's twin in the environment counts before the preset"


main(*sys.argv[1:])
