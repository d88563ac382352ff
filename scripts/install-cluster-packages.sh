#!/usr/bin/env bash
# Debian packages of the Slurm and the Kubernetes of one machine that `make test-clusters` starts.
set -euo pipefail

wanted=()
for each in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge; do
  command -v "${each%:*}" >/dev/null || wanted+=("${each#*:}")
done
command -v kubectl >/dev/null || wanted+=(kubernetes-client)
for each in containerd:containerd runc:runc etcd:etcd-server iptables:iptables conntrack:conntrack \
  dnsmasq:dnsmasq-base openssl:openssl curl:curl ps:procps xz:xz-utils; do
  command -v "${each%:*}" >/dev/null || wanted+=("${each#*:}")
done
[ -x /usr/lib/cni/bridge ] || wanted+=(containernetworking-plugins)
[ "${#wanted[@]}" = 0 ] && exit 0

root=()
[ "$(id -u)" = 0 ] || root=(sudo)
"${root[@]}" apt-get update -qq
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${wanted[@]}"
