#!/usr/bin/env python3
"""Every rule of check_layers.py fires on a tree that breaks it, at the line that does, and on nothing else."""

import pathlib
import tempfile
import unittest

import check_layers


class CheckLayersTest(unittest.TestCase):
    def findings(self, files: dict[str, str]) -> list[tuple[str, int, str]]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            return [(f.path, f.line, f.rule) for f in check_layers.check(root)]

    def include(self, path: str, target: str) -> list[str]:
        """The rules that one include breaks; it stands on line 2."""
        found = self.findings({path: f'#pragma once\n#include "{target}"\n'})
        for finding in found:
            self.assertEqual(finding[:2], (path, 2))
        return [rule for _, _, rule in found]

    def test_the_drawn_tree_holds(self):
        self.assertEqual(self.findings({
            "kernels/cpu/gate.cc": '#include "kernels/kernels.h"\n#include <vector>\n',
            "server/refusal/refusal.h": '#include "absl/status/status.h"\n',
            "server/observe/metrics.h": "#include <prometheus/counter.h>\n",
            "server/model/model.cc": '#include "kernels/kernels.h"\n#include "server/refusal/refusal.h"\n',
            "server/engine/engine.h": '#include "server/model/model.h"\n#include "server/observe/metrics.h"\n',
            "server/session/table.h": '#include "server/refusal/refusal.h"\n',
            "server/admission/budget.h": '#include "server/refusal/refusal.h"\n',
            "server/regions/store.h": '#include "server/refusal/refusal.h"\n#include "server/observe/log.h"\n',
            "server/transport/service.cc": '#include "server/engine/engine.h"\n#include "engram/v1/engram.pb.h"\n',
            "server/server.cc": '#include "server/transport/service.h"\n#include "kernels/kernels.h"\n',
            "server/options_file.cc": '#include "server/engine/engine.h"\n',
            "server/main.cc": '#include "server/server.h"\n#include "CLI/CLI.hpp"\n',
            "client/cli.cc": '#include "client/client.h"\n#include "grpcpp/channel.h"\n',
            "tests/engine/engine_test.cc": '#include "server/session/table.h"\n#include "server/engine/engine.h"\n',
        }), [])

    def test_no_layer_looks_to_its_left(self):
        row = ["transport", "admission", "session", "engine"]
        for index, layer in enumerate(row):
            for left in row[:index]:
                with self.subTest(layer=layer, left=left):
                    self.assertEqual(self.include(f"server/{layer}/x.cc", f"server/{left}/y.h"), ["layer"])

    def test_a_layer_knows_less_than_its_place_would_let_it(self):
        for path, target in [
            ("server/session/x.cc", "server/engine/y.h"),
            ("server/admission/x.cc", "server/engine/y.h"),
            ("server/admission/x.cc", "server/session/y.h"),
            ("server/transport/x.cc", "client/client.h"),
            ("server/model/x.cc", "server/engine/y.h"),
            ("server/model/x.cc", "server/session/y.h"),
            ("server/regions/x.cc", "server/engine/y.h"),
            ("server/regions/x.cc", "server/transport/y.h"),
            ("server/engine/x.cc", "server/regions/y.h"),
        ]:
            with self.subTest(path=path, target=target):
                self.assertEqual(self.include(path, target), ["layer"])

    def test_leaves_include_nothing_of_ours(self):
        for leaf in ["refusal", "observe"]:
            for other in ["server/model/y.h", "kernels/kernels.h", "server/server.h"]:
                with self.subTest(leaf=leaf, other=other):
                    self.assertEqual(self.include(f"server/{leaf}/x.h", other), ["layer"])
        self.assertEqual(self.include("server/observe/x.h", "server/refusal/refusal.h"), ["layer"])

    def test_nobody_includes_the_composition_root(self):
        self.assertEqual(self.include("server/transport/x.cc", "server/options.h"), ["layer"])
        self.assertEqual(self.include("client/x.cc", "server/server.h"), ["layer"])

    def test_client_and_server_meet_on_the_wire_only(self):
        self.assertEqual(self.include("client/x.cc", "server/refusal/refusal.h"), ["layer"])
        self.assertEqual(self.include("client/x.cc", "kernels/kernels.h"), ["layer"])
        self.assertEqual(self.include("server/engine/x.cc", "client/client.h"), ["layer"])

    def test_the_bench_computes_in_one_folder(self):
        self.assertEqual(self.include("client/bench/recompute/x.cc", "server/engine/y.h"), [])
        self.assertEqual(self.include("client/bench/x.cc", "client/bench/recompute/y.h"), [])
        self.assertEqual(self.include("client/bench/x.cc", "client/channels.h"), [])
        self.assertEqual(self.include("client/bench/x.cc", "kernels/kernels.h"), ["layer"])
        self.assertEqual(self.include("client/bench/recompute/x.cc", "server/session/y.h"), ["layer"])
        self.assertEqual(self.include("client/bench/recompute/x.cc", "grpcpp/channel.h"), ["wire"])
        self.assertEqual(self.include("client/x.cc", "client/bench/y.h"), ["layer"])

    def test_the_wire_stays_in_transport_root_and_client(self):
        for path in ["server/engine/x.cc", "server/session/x.cc", "server/model/x.cc", "server/admission/x.cc",
                     "server/refusal/x.cc", "server/observe/x.cc", "kernels/x.cc"]:
            for target in ["grpcpp/server.h", "engram/v1/engram.pb.h", "google/protobuf/message.h"]:
                with self.subTest(path=path, target=target):
                    self.assertEqual(self.include(path, target), ["wire"])

    def test_kernels_know_plain_memory_only(self):
        for target in ["absl/types/span.h", "CLI/CLI.hpp", "prometheus/counter.h"]:
            self.assertEqual(self.include("kernels/x.h", target), ["kernel"])
        for header in ["fstream", "iostream", "sys/mman.h"]:
            self.assertEqual(self.findings({"kernels/x.cc": f"#include <{header}>\n"}), [("kernels/x.cc", 1, "kernel")])
        self.assertEqual(self.include("kernels/x.h", "server/model/y.h"), ["layer"])

    def test_a_relative_path_does_not_hide_an_include(self):
        self.assertEqual(self.include("server/engine/x.cc", "../session/y.h"), ["include-path"])
        self.assertEqual(self.findings({"server/engine/x.cc": '#include "y.h"\n', "server/engine/y.h": "#pragma once\n"}),
                         [("server/engine/x.cc", 1, "include-path")])

    def test_a_new_folder_or_stray_file_must_be_placed(self):
        self.assertEqual(self.findings({"server/utils/x.h": "#pragma once\n"}), [("server/utils/x.h", 1, "placement")])
        self.assertEqual(self.findings({"server/helpers.cc": "\n"}), [("server/helpers.cc", 1, "placement")])

    def test_cuda_conditions_stand_in_one_factory(self):
        condition = "\n#ifdef ENGRAM_CUDA\n#endif\n"
        factory = "server/engine/backend_factory.cc"
        self.assertEqual(self.findings({factory: condition, "kernels/cuda/x.cu": condition}), [])
        self.assertEqual(self.findings({factory: condition, "server/engine/x.cc": "#if defined(ENGRAM_CUDA)\n#endif\n"}),
                         [(factory, 2, "cuda"), ("server/engine/x.cc", 1, "cuda")])
        self.assertEqual(self.findings({"server/main.cc": condition}), [("server/main.cc", 2, "cuda")])

    def test_a_file_beyond_600_lines_has_two_jobs(self):
        self.assertEqual(self.findings({"client/x.cc": "\n" * 600}), [])
        self.assertEqual(self.findings({"client/x.cc": "\n" * 601}), [("client/x.cc", 601, "length")])
        self.assertEqual(self.findings({"tests/data/x.json": "\n" * 601}), [])

    def test_no_path_of_one_machine(self):
        path = "/".join(["", "home", "somebody", "engram"])
        self.assertEqual(self.findings({"scripts/x": f"\ncd {path}\n"}), [("scripts/x", 2, "machine-path")])
        self.assertEqual(self.findings({"docs/x.md": "\nfrom https://example.org/home/page, $HOME/work/x\n"}), [])

    def test_a_finding_says_where_and_what_to_do(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "server/session").mkdir(parents=True)
            (root / "server/session/x.cc").write_text('#include "server/transport/y.h"\n', encoding="utf-8")
            text = str(check_layers.check(root)[0])
        self.assertTrue(text.startswith("server/session/x.cc:1: layer: session includes server/transport/y.h"), text)
        self.assertIn("may include: kernels, observe, refusal", text)


if __name__ == "__main__":
    unittest.main()
