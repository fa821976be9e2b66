// Kernels with one fault each, and their correct twins.
//
//   executor_faults NAME faulty|correct
//   executor_faults all correct
//
// Exits 0 where nothing noticed; kWrong where the result is wrong; as the executor or the sanitizer does where they
// did. faults_test.cc says which build must notice what.
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int kWrong = 3;
constexpr int kThreads = 64;
constexpr unsigned kAll = ~0u;

bool faulty = false;
bool wrong = false;

void Expect(bool as_it_should_be) { wrong = wrong || !as_it_should_be; }

template <class... Params, class... Args>
void Run(int blocks, int threads, size_t dynamic_bytes, void (*kernel)(Params...), Args... args) {
  cudaLaunchConfig_t config;
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = dynamic_bytes;
  Expect(cudaLaunchKernelEx(&config, kernel, args...) == cudaSuccess);
}

// Each thread reads what its neighbour wrote.
__global__ void Neighbour(bool fault, int* out) {
  int* values = simt::Shared<int, 0>(kThreads);
  const int t = threadIdx.x;
  values[t] = t;
  if (!fault) __syncthreads();
  out[t] = values[(t + 1) % kThreads];
}

// The same twice over one buffer: without the second barrier a value may be overwritten before it is read.
__global__ void NeighbourAgain(bool fault, int* out) {
  int* values = simt::Shared<int, 0>(kThreads);
  const int t = threadIdx.x;
  values[t] = 0;
  __syncthreads();
  out[t] = values[(t + 1) % kThreads];
  if (!fault) __syncthreads();
  values[t] = t;
  __syncthreads();
  out[t] += values[(t + 1) % kThreads];
}

template <void (*kKernel)(bool, int*)>
void ReadsNeighbour() {
  std::vector<int> out(kThreads, -7);
  Run(1, kThreads, 0, kKernel, faulty, out.data());
  for (int t = 0; t < kThreads; ++t) Expect(out[t] == (t + 1) % kThreads);
}

// Half a warp adds up; the fault names its other half.
__global__ void HalfSum(bool fault, int* out) {
  if (threadIdx.x >= 16) return;
  int sum = 1;
  for (int bits = 8; bits > 0; bits /= 2) sum += __shfl_xor_sync(fault ? 0xFFFF0000u : 0xFFFFu, sum, bits);
  *(out + threadIdx.x) = sum;
}
void WrongMask() {
  std::vector<int> out(32);
  Run(1, 32, 0, HalfSum, faulty, out.data());
  for (int t = 0; t < 16; ++t) Expect(out[t] == 16);
}

// Lanes that have left are still named.
__global__ void AllOrHalf(bool fault, int* out) {
  if (threadIdx.x >= 16) return;
  out[threadIdx.x] = __popc(__ballot_sync(fault ? kAll : 0xFFFFu, 1));
}
void ExitedLane() {
  std::vector<int> out(32);
  Run(1, 32, 0, AllOrHalf, faulty, out.data());
  Expect(out[0] == 16);
}

// Lanes of one warp, apart, at two collectives.
__global__ void TwoPlaces(bool fault, int* out) {
  int value = threadIdx.x;
  if (threadIdx.x < 16) {
    value = __shfl_xor_sync(fault ? kAll : 0xFFFFu, value, 1);
  } else {
    value = __shfl_xor_sync(fault ? kAll : 0xFFFF0000u, value, 2);
  }
  out[threadIdx.x] = value;
}
void Disagreement() {
  std::vector<int> out(32);
  Run(1, 32, 0, TwoPlaces, faulty, out.data());
  Expect(out[0] == 1 && out[16] == 18);
}

// A warp at a barrier that waits for it at a collective.
__global__ void BarrierAndBallot(bool fault, int* out) {
  if (fault && threadIdx.x == 5) {
    __syncthreads();
    __ballot_sync(kAll, 1);
  } else {
    __ballot_sync(kAll, 1);
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}
void Deadlock() {
  std::vector<int> out(32);
  Run(1, 32, 0, BarrierAndBallot, faulty, out.data());
}

// A sum per row of 3; the fault takes one row too many.
__global__ void RowSums(bool fault, const int* table, int rows, int* out) {
  for (int row = threadIdx.x; row < rows + (fault ? 1 : 0); row += blockDim.x) {
    out[row] = table[row * 3] + table[row * 3 + 1] + table[row * 3 + 2];
  }
}
void LastRow() {
  constexpr int kRows = 40;
  int* table = nullptr;
  cudaMalloc(&table, kRows * 3 * sizeof(int));
  for (int i = 0; i < kRows * 3; ++i) table[i] = i;
  std::vector<int> out(kRows + 1);
  Run(1, kThreads, 0, RowSums, faulty, static_cast<const int*>(table), kRows, out.data());
  Expect(out[kRows - 1] == 3 * (3 * kRows - 2));
  cudaFree(table);
}

// Dynamic shared memory of one int per thread; the fault writes one more.
__global__ void FillShared(bool fault) {
  int* values = reinterpret_cast<int*>(simt::DynamicShared());
  values[threadIdx.x + (fault ? 1 : 0)] = 0;
}
void SharedEnd() { Run(1, kThreads, kThreads * sizeof(int), FillShared, faulty); }

// Shared memory that nobody wrote.
__global__ void ReadsShared(bool fault, int* out) {
  int* values = simt::Shared<int, 0>(kThreads);
  if (!fault) values[threadIdx.x] = 0;
  out[threadIdx.x] = values[threadIdx.x];
}
void Uninitialised() {
  std::vector<int> out(kThreads);
  Run(1, kThreads, 0, ReadsShared, faulty, out.data());
  for (int value : out) Expect(value == 0);
}

// Lanes exchange through shared memory. All have arrived at the shuffle, but it orders no memory.
__global__ void ExchangeInWarp(bool fault, int* out) {
  int* values = simt::Shared<int, 0>(32);
  const int t = threadIdx.x;
  values[t] = t;
  const int lane = __shfl_sync(kAll, t, t ^ 1);
  if (!fault) __syncwarp();
  out[t] = values[lane];
}
void OnlyShuffled() {
  std::vector<int> out(32);
  Run(1, 32, 0, ExchangeInWarp, faulty, out.data());
  for (int t = 0; t < 32; ++t) Expect(out[t] == (t ^ 1));
}

// A warp barrier orders its own mask alone: the halves meet apart.
__global__ void ExchangeInHalves(bool fault, int* out) {
  int* values = simt::Shared<int, 0>(32);
  const int t = threadIdx.x;
  values[t] = t;
  __syncwarp(t < 16 ? 0xFFFFu : 0xFFFF0000u);
  out[t] = values[t ^ (fault ? 16 : 1)] & 1;
}
void OtherHalf() {
  std::vector<int> out(32);
  Run(1, 32, 0, ExchangeInHalves, faulty, out.data());
}

// Each block writes its own 64 values, or one too many.
__global__ void Fill(bool fault, int* out) {
  const int per = kThreads + (fault ? 1 : 0);
  for (int i = threadIdx.x; i < per; i += blockDim.x) out[kThreads * blockIdx.x + i] = 1;
}
void TwoBlocks() {
  std::vector<int> out(kThreads * 3 + 1);
  Run(3, 32, 0, Fill, faulty, out.data());
}

// Blocks that hand a sum on: who counts last reads what the others wrote. Right with a fence, a race without.
__global__ void LastBlock(bool fault, int* parts, unsigned* done, int* out) {
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = 1;
    if (!fault) __threadfence();
    if (atomicAdd(done, 1u) == gridDim.x - 1) {
      if (!fault) __threadfence();
      *out = 0;
      for (unsigned i = 0; i < gridDim.x; ++i) *out += parts[i];
    }
  }
}
void NoFence() {
  std::vector<int> parts(4);
  unsigned done = 0;
  int out = -1;
  Run(4, 32, 0, LastBlock, faulty, parts.data(), &done, &out);
  Expect(out == 4);
}

// Row 2^20 of 4608 bytes begins beyond 4 GiB; the fault computes its place in 32 bits.
constexpr int64_t kPitch = 4608, kRow = 1 << 20;
__global__ void ReadRow(bool fault, const uint8_t* table, uint32_t row, uint8_t* out) {
  const uint64_t offset = fault ? row * static_cast<uint32_t>(kPitch) : row * static_cast<uint64_t>(kPitch);
  out[threadIdx.x] = table[offset + threadIdx.x];
}
void RowOffset() {
  const size_t bytes = kPitch * (kRow + 1);
  void* table = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (table == MAP_FAILED) {
    perror("mmap");
    exit(77);
  }
  std::vector<uint8_t> out(kThreads);
  for (int t = 0; t < kThreads; ++t) static_cast<uint8_t*>(table)[kPitch * kRow + t] = static_cast<uint8_t>(t + 1);
  Run(1, kThreads, 0, ReadRow, faulty, static_cast<const uint8_t*>(table), static_cast<uint32_t>(kRow), out.data());
  for (int t = 0; t < kThreads; ++t) Expect(out[t] == t + 1);
  munmap(table, bytes);
}

// Each thread fetches 16 bytes and reads them; the fault does not wait for the last group.
__global__ void Fetch(bool fault, const int4* in, int4* out) {
  int4* values = simt::Shared<int4, 0>(2 * kThreads);
  const int t = threadIdx.x;
  for (int group = 0; group < 2; ++group) {
    simt::CopyAsync(&values[kThreads * group + t], &in[kThreads * group + t], 16);
    simt::CommitCopies();
  }
  simt::WaitCopies(fault ? 1 : 0);
  out[t] = values[t];
  out[kThreads + t] = values[kThreads + t];
}
void NoWait() {
  std::vector<int4> in(2 * kThreads, int4{1, 2, 3, 4}), out(2 * kThreads);
  Run(1, kThreads, 0, Fetch, faulty, static_cast<const int4*>(in.data()), out.data());
  for (const int4& value : out) Expect(value.x == 1 && value.w == 4);
}

// Each thread reads what its neighbour fetched: waiting is for one's own copies.
__global__ void FetchForNeighbour(bool fault, const int4* in, int* out) {
  int4* values = simt::Shared<int4, 0>(kThreads);
  const int t = threadIdx.x;
  simt::CopyAsync(&values[t], &in[t], 16);
  simt::CommitCopies();
  simt::WaitCopies(0);
  __shfl_sync(kAll, t, 0);  // all of a warp have waited, so its neighbours' bytes are there
  if (!fault) __syncwarp();
  out[t] = values[t ^ 1].x;
}
void WaitsForItselfAlone() {
  std::vector<int4> in(kThreads, int4{5, 0, 0, 0});
  std::vector<int> out(kThreads);
  Run(1, kThreads, 0, FetchForNeighbour, faulty, static_cast<const int4*>(in.data()), out.data());
  for (int value : out) Expect(value == 5);
}

__global__ void FetchUnaligned(bool fault, const char* in) {
  int* values = simt::Shared<int, 0>(8);
  simt::CopyAsync(values, in + (fault ? 4 : 0), 16);
  simt::CommitCopies();
  simt::WaitCopies(0);
}
void Misaligned() {
  alignas(16) char in[32] = {};
  Run(1, 1, 0, FetchUnaligned, faulty, static_cast<const char*>(in));
}

struct Fault {
  const char* name;
  void (*run)();
};
constexpr Fault kFaults[] = {
    {"missing_barrier", ReadsNeighbour<Neighbour>},
    {"missing_second_barrier", ReadsNeighbour<NeighbourAgain>},
    {"wrong_mask", WrongMask},
    {"exited_lane", ExitedLane},
    {"two_collectives", Disagreement},
    {"deadlock", Deadlock},
    {"past_the_last_row", LastRow},
    {"past_shared_memory", SharedEnd},
    {"unwritten_shared_memory", Uninitialised},
    {"only_a_shuffle_between", OnlyShuffled},
    {"other_half_of_the_warp", OtherHalf},
    {"two_blocks_one_address", TwoBlocks},
    {"no_fence", NoFence},
    {"row_offset_of_32_bits", RowOffset},
    {"missing_copy_wait", NoWait},
    {"waits_for_itself_alone", WaitsForItselfAlone},
    {"misaligned_copy", Misaligned},
};

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc == 3 ? argv[1] : "", variant = argc == 3 ? argv[2] : "";
  const bool all = name == "all" && variant == "correct";
  int found = 0;
  for (const Fault& fault : kFaults) {
    if (!all && name != fault.name) continue;
    ++found;
    faulty = variant == "faulty";
    if (all) fprintf(stderr, "%s\n", fault.name);
    simt::ForEachOrder(fault.run);
    if (wrong) fprintf(stderr, "wrong result\n");
  }
  if (found == 0) {
    fprintf(stderr, "executor_faults NAME faulty|correct, or: executor_faults all correct\n");
    return 2;
  }
  return wrong ? kWrong : 0;
}
