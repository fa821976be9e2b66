#include "tests/bench/peers.h"

namespace engram::kernels {

std::vector<Peer> Peers() {
  return {
#ifdef ENGRAM_BENCH_ONEDNN
      {"onednn_bf16", false, &PrepareOneDnn},
#endif
#ifdef ENGRAM_BENCH_GGML
      {"ggml_q2k", true, &PrepareGgml},
      {"ggml_repacked_q2k", true, &PrepareGgmlRepacked},
#endif
  };
}

}  // namespace engram::kernels
