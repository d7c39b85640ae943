#!/usr/bin/env bash
# Install components for tests: sshd, pdsh, ip, Slurm, munge, shellcheck, Chromium. Best effort: prints what is missing,
# and never fails.
#
# Tests skip, with a reason, if their component is missing. Only for Debian and Ubuntu, run by root.
set -uo pipefail

packages=(openssh-server openssh-client pdsh iproute2 slurmctld slurmd slurm-client munge shellcheck chromium)
commands=(sshd ssh pdsh ip slurmctld slurmd sbatch munged shellcheck chromium)
export PATH="$PATH:/usr/sbin:/sbin" DEBIAN_FRONTEND=noninteractive

missing() {
    local name
    for name in "${commands[@]}"; do
        command -v "$name" >/dev/null || printf '%s ' "$name"
    done
}

if [[ -n "$(missing)" ]]; then
    if [[ "$(id -u)" != 0 ]] || ! command -v apt-get >/dev/null; then
        echo "components: $(missing)not found, and apt-get or root is not available; their tests will be skipped" >&2
        exit 0
    fi
    timeout 120 apt-get update -qq >/dev/null 2>&1 &&
        timeout 300 apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null 2>&1
fi
[[ "$(id -u)" == 0 ]] && install -d -m 755 /run/sshd
if [[ -n "$(missing)" ]]; then
    echo "components: $(missing)could not be installed; their tests will be skipped" >&2
else
    echo "components: sshd, pdsh, Slurm, shellcheck and Chromium are installed"
fi
exit 0
