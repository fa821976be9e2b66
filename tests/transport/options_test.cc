#include "server/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace engram {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

CommandLine Parse(std::vector<std::string> args) {
  args.insert(args.begin(), {"engram-server"});
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  return ParseCommandLine(static_cast<int>(argv.size()), argv.data());
}

TEST(OptionsTest, DefaultsAreThoseOfTheContract) {
  const CommandLine line = Parse({"--model", "m.gguf"});
  ASSERT_FALSE(line.exit) << line.text;
  const ServerOptions& o = line.options;
  EXPECT_THAT(o.listen, ElementsAre("127.0.0.1:8001"));
  EXPECT_EQ(o.http_listen, "127.0.0.1:8002");
  EXPECT_EQ(o.max_batch_tokens, 1024);
  EXPECT_EQ(o.max_queue_tokens, 65536);
  EXPECT_EQ(o.max_queue_bytes, int64_t{1} << 30);
  EXPECT_EQ(o.max_message_bytes, int64_t{64} << 20);
  EXPECT_EQ(o.session_ttl_secs, 600);
  EXPECT_EQ(o.session_memory_bytes, int64_t{1} << 30);
  EXPECT_EQ(o.session_window, 8192);
  EXPECT_EQ(o.position_limit, 1048576);
  EXPECT_EQ(o.drain_delay_secs, 5);
  EXPECT_EQ(o.drain_timeout_secs, 30);
  EXPECT_EQ(o.probe_interval_secs, 300);
  EXPECT_EQ(o.shm_listen, "off");
  EXPECT_EQ(o.shm_memory_bytes, int64_t{1} << 30);
  EXPECT_GE(o.threads, 1);
  EXPECT_EQ(o.residency, TableHome::kUnsaid);
}

TEST(OptionsTest, AFlagBeatsItsEnvironmentTwinWhichBeatsTheDefault) {
  ::setenv("ENGRAM_MAX_BATCH_TOKENS", "77", 1);
  ::setenv("ENGRAM_RESIDENCY", "mmap", 1);
  const CommandLine from_environment = Parse({"--model", "m.gguf"});
  const CommandLine from_flag = Parse({"--model", "m.gguf", "--max-batch-tokens", "78", "--residency", "ram"});
  ::unsetenv("ENGRAM_MAX_BATCH_TOKENS");
  ::unsetenv("ENGRAM_RESIDENCY");
  ASSERT_FALSE(from_environment.exit) << from_environment.text;
  EXPECT_EQ(from_environment.options.max_batch_tokens, 77);
  EXPECT_EQ(from_environment.options.residency, TableHome::kMmap);
  EXPECT_EQ(from_flag.options.max_batch_tokens, 78);
  EXPECT_EQ(from_flag.options.residency, TableHome::kRam);
}

TEST(OptionsTest, SizesTakeUnits) {
  const CommandLine line = Parse({"--model", "m.gguf", "--max-message-bytes", "2MiB", "--max-queue-bytes", "3GiB"});
  ASSERT_FALSE(line.exit) << line.text;
  EXPECT_EQ(line.options.max_message_bytes, 2 << 20);
  EXPECT_EQ(line.options.max_queue_bytes, int64_t{3} << 30);
}

TEST(OptionsTest, ListenRepeats) {
  const CommandLine line = Parse({"--model", "m.gguf", "--listen", "127.0.0.1:0", "--listen", "unix:/tmp/s"});
  EXPECT_THAT(line.options.listen, ElementsAre("127.0.0.1:0", "unix:/tmp/s"));
}

TEST(OptionsTest, MistakesAreNamedWithTheirFlag) {
  struct Mistake {
    std::vector<std::string> args;
    const char* says;
  };
  const std::vector<Mistake> mistakes = {
      {{}, "--model is missing"},
      {{"--model", "m", "--threads", "0"}, "--threads"},
      {{"--model", "m", "--cpu-isa", "avx1024"}, "--cpu-isa"},
      {{"--model", "m", "--max-message-bytes", "9GiB"}, "--max-message-bytes"},
      {{"--model", "m", "--max-message-bytes", "lots"}, "--max-message-bytes"},
      {{"--model", "m", "--residency", "disk"}, "--residency"},
      {{"--model", "m", "--backend", "tpu"}, "--backend"},
      {{"--model", "m", "--backend", "cpu", "--residency", "host"},
       "--residency host: --backend cpu takes ram or mmap"},
      {{"--model", "m", "--backend", "cuda", "--residency", "mmap"}, "--residency mmap: --backend cuda takes"},
      {{"--model", "m", "--device", "-1"}, "--device"},
      {{"--model", "m", "--layers", "1,x"}, "--layers"},
      {{"--model", "m", "--session-window", "1"}, "--session-window"},
      {{"--model", "m", "--listen", "10.0.0.1:8001"}, "--insecure"},
      {{"--model", "m", "--http-listen", "0.0.0.0:8002"}, "--http-listen"},
      {{"--model", "m", "--max-queue-bytes", "1MiB"}, "would never be admitted"},
      {{"--model", "m", "--probe-interval-secs", "-1"}, "--probe-interval-secs"},
      {{"--model", "m", "--shm-listen", "127.0.0.1:8004"}, "--shm-listen 127.0.0.1:8004"},
      {{"--model", "m", "--shm-listen", "unix:"}, "--shm-listen"},
      {{"--model", "m", "--shm-memory-bytes", "1"}, "--shm-memory-bytes"},
      {{"--model", "m", "stray"}, "stray"},
  };
  for (const Mistake& mistake : mistakes) {
    const CommandLine line = Parse(mistake.args);
    EXPECT_TRUE(line.exit);
    EXPECT_EQ(line.exit_code, 2);
    EXPECT_THAT(line.text, HasSubstr(mistake.says));
  }
}

TEST(OptionsTest, BeyondLoopbackWithInsecure) {
  EXPECT_FALSE(Parse({"--model", "m", "--insecure", "--listen", "0.0.0.0:8001", "--http-listen", "0.0.0.0:8002"}).exit);
}

}  // namespace
}  // namespace engram
