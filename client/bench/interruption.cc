#include "client/bench/interruption.h"

#include <signal.h>

#include <utility>

namespace engram::bench {
namespace {

sigset_t Signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  return signals;
}

}  // namespace

Interruption::Interruption(std::function<void()> finish) : finish_(std::move(finish)) {
  const sigset_t signals = Signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  thread_ = std::thread([this] { Watch(); });
}

Interruption::~Interruption() {
  over_ = true;
  pthread_kill(thread_.native_handle(), SIGTERM);
  thread_.join();
  const sigset_t signals = Signals();
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
}

void Interruption::Watch() {
  const sigset_t signals = Signals();
  int signal = 0;
  if (sigwait(&signals, &signal) != 0 || over_) return;
  finish_();
  // The default action, so that whoever waits for the process sees what ended it.
  ::signal(signal, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  raise(signal);
}

}  // namespace engram::bench
