# engram-server for CPUs.
#
#   docker build -t engram-server .
#   docker build -t engram-server --build-arg BASE_IMAGE=ubuntu:24.04 .
#
# Any base with the packages of Debian 12 or Ubuntu 24.04 will do; both stages use the same one, so that the libraries
# built against are the libraries run with.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS build
WORKDIR /src
# The packages first: this layer stays while the sources change.
COPY scripts/install-packages scripts/
RUN scripts/install-packages build
COPY . .
RUN cmake --preset release -D ENGRAM_BUILD_TESTS=OFF \
  && cmake --build build/release \
  && install -D --strip --target-directory=/out/bin \
       build/release/bin/engram-server build/release/bin/engram-cli build/release/bin/engram-model \
  && scripts/runtime-packages /out/bin/* >/out/packages

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="engram-server" \
      org.opencontainers.image.description="Serves the engram memory of a model to inference workers over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /out/packages /usr/share/engram/packages
# The names differ between distributions, so the build stage looked them up.
RUN apt-get update \
  && DEBIAN_FRONTEND=noninteractive xargs -a /usr/share/engram/packages apt-get install -y --no-install-recommends \
  && rm -rf /var/lib/apt/lists/* \
  && install -d -o 65532 -g 65532 /run/engram
COPY --from=build /out/bin/ /usr/local/bin/
COPY LICENSE /usr/share/doc/engram/
# Nobody in particular: the server writes nothing but its unix sockets, in /run/engram.
USER 65532:65532
# gRPC and metrics. Inside, the defaults listen on loopback only: deploy/README.md says how to be reached.
EXPOSE 8001 8002
STOPSIGNAL SIGTERM
ENTRYPOINT ["engram-server"]
