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


CHUNK = 64 << 20


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
    config_digest = hashlib.sha256(text).digest()

    text = b"engram.content_digest.v1\n" + config_digest
    for layer in layers:
        _, ne, raw = tensors["blk.%d.engram_embd.weight" % layer]
        chunks = [raw[at:at + CHUNK] for at in range(0, len(raw), CHUNK)]
        text += i64(layer, ne[1], len(raw), len(chunks)) + b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    return hash_digest.hex(), config_digest.hex(), hashlib.sha256(text).hexdigest(), keys, tensors


def run(tool, *args):
    return subprocess.run([tool, *args], capture_output=True, text=True)


# The sidecar's text, from docs/formats.md.
def sidecar_text(paths, config_digest, content_digest):
    text = "engram.digest.v1\ncontent_digest %s\nconfig_digest %s\n" % (content_digest, config_digest)
    for path in paths:
        seen = os.stat(path)
        text += "shard %d %d %s\n" % (seen.st_size, seen.st_mtime_ns, os.path.basename(path))
    return text


def check_digest_command(tool, paths, wanted):
    seen = run(tool, "digest", paths[0], "--threads", "3")
    assert seen.returncode == 0 and seen.stdout.split() == [
        "hash_digest", wanted[0], "config_digest", wanted[1], "content_digest", wanted[2]], seen
    seen = json.loads(run(tool, "digest", paths[0], "--json", "--threads", "1").stdout)
    assert (seen["hash_digest"], seen["config_digest"], seen["content_digest"]) == wanted
    assert "sidecar" not in seen and not os.path.exists(paths[0] + ".digest")


def check_sidecar(tool, paths, wanted):
    sidecar = paths[0] + ".digest"
    with open(sidecar, "w") as file:
        file.write("what stood there before")
    seen = run(tool, "digest", paths[0], "--write", "--json")
    assert seen.returncode == 0 and json.loads(seen.stdout)["sidecar"] == sidecar, seen
    with open(sidecar) as file:
        assert file.read() == sidecar_text(paths, wanted[1], wanted[2])
    folder = os.path.dirname(sidecar)
    assert not [name for name in os.listdir(folder) if "partial" in name]
    os.remove(sidecar)
    os.mkdir(sidecar)
    seen = run(tool, "digest", paths[0], "--write")
    assert seen.returncode == 2 and sidecar in seen.stderr, seen
    assert not [name for name in os.listdir(folder) if "partial" in name]
    os.rmdir(sidecar)


# As printed in docs/formats.md.
KNOWN = {
    "tiny": ("60461cddeb00d430e4ea3f6ad682ec27477627cee51615182ff2bbc181ceefc4",
             "b47e80ddcb29a288004951739ae658dbf02813b3a273b55d727a4a231ad91276",
             "325a4dc75b9540a18c5f9f908712c3b6127c430f833372ece1004b52f1490a5b"),
    "split": ("9fdd8ed8151cde5de39c028479d5268a722d8b2b36e9bcf3834f023a1a3c02bf",
              "ab9e36d085d98c9fd8f217946d7c05dcede4dce41f6942f076dc0c34c809782e",
              "259eea1da4280c70d9fe1b4e72820258794335cd3d797a850201ac76688358b9"),
}


def main(tool, data):
    with tempfile.TemporaryDirectory() as folder:
        synth = os.path.join(folder, "synth.gguf")
        subprocess.run([tool, "synth", "--out", synth, "--dead-tokens", "7", "--wkv-type", "q8_0", "--qk-type", "f16",
                        "--dim", "48", "--split", "2"], check=True, stdout=subprocess.DEVNULL)
        # A table of two whole chunks and a part: 8 columns of about 200,000 rows are 134 MB and more.
        large = os.path.join(folder, "large.gguf")
        subprocess.run([tool, "synth", "--out", large, "--layers", "3", "--max-ngram", "2", "--engram-vocab-size",
                        "203000", "--dim", "16", "--hc", "1"], check=True, stdout=subprocess.DEVNULL)
        cases = {
            "tiny": [os.path.join(data, "tiny/tiny.gguf")],
            "split": [os.path.join(data, "split/split-0000%d-of-00002.gguf" % i) for i in (1, 2)],
            "large": [large],
            "synth": [os.path.join(folder, "synth-0000%d-of-00002.gguf" % i) for i in (1, 2)],
        }
        for name, paths in cases.items():
            hash_digest, config_digest, content_digest, keys, tensors = digests(paths)
            wanted = (hash_digest, config_digest, content_digest)
            seen = json.loads(subprocess.run([tool, "inspect", paths[0], "--json"], check=True,
                                             stdout=subprocess.PIPE).stdout)
            assert seen["hash_digest"] == hash_digest, (name, seen["hash_digest"], hash_digest)
            assert seen["config_digest"] == config_digest, (name, seen["config_digest"], config_digest)
            assert KNOWN.get(name, wanted) == wanted, (name, wanted)
            check_digest_command(tool, paths, wanted)
            if paths[0].startswith(folder):
                check_sidecar(tool, paths, wanted)
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
            print(name, *wanted)

        refused = subprocess.run([tool, "inspect", os.path.join(data, "ds4/ds4.gguf")], capture_output=True, text=True)
        assert refused.returncode == 2 and refused.stdout == "" and refused.stderr.count("\n") == 1, refused
        for wrong in (["digest"], ["digest", os.path.join(folder, "missing.gguf")], ["inspect"], ["inspect", "x", "--no-such-flag"], ["synth"], [], ["synth", "--out", "/", "--hc", "9"]):
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
