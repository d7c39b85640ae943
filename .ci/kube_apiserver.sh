#!/usr/bin/env bash
# Build a real Kubernetes API server for tests/launch/test_real_kubernetes.py, from Debian's source packages.
#
# usage: .ci/kube_apiserver.sh FOLDER     then: SHARDTRAIN_KUBE=FOLDER ./run_tests.sh tests/launch/test_real_kubernetes.py
#
# Debian has no package for kube-apiserver, but its source of kubectl (bookworm) contains all of Kubernetes 1.20. Packages
# are unpacked into FOLDER and not installed, so root is not needed. Takes 100 MB of downloads, 3 GB of disk, and
# 12 minutes of one core. Existing results are reused. Requires dpkg-dev, gcc, make and jq.
set -euo pipefail

(($# == 1)) || { sed -n '2,9p' "$0" >&2; exit 2; }
mkdir -p "$1"
folder="$(cd -- "$1" && pwd)"
bin="$folder/bin"
if [[ -x "$bin/kube-apiserver" && -x "$bin/etcd" && -d "$folder/kubeflow-training" ]]; then
    echo "kube-apiserver and etcd are in $bin"
    exit 0
fi
for name in dpkg-source apt-get gcc make jq; do
    command -v "$name" >/dev/null || { echo "error[2]: $name not found; apt-get install dpkg-dev gcc make jq" >&2; exit 2; }
done

# sources of Debian bookworm, with lists and packages separate from those of the system
apt="$folder/apt"
mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$folder/debs" "$folder/source" "$folder/root" "$bin"
for kind in deb deb-src; do
    for suite in "debian bookworm" "debian-security bookworm-security"; do
        echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/$suite main"
    done
done >"$apt/sources.list"
cat >"$apt/conf" <<END
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::State::lists "$apt/lists";
Dir::Cache "$apt";
Dir::Cache::archives "$apt/archives";
APT::Sandbox::User "$(id -un)";
END
export APT_CONFIG="$apt/conf"
apt-get update -qq
(cd "$folder/debs" && apt-get download -qq golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev \
    etcd-server rsync libpopt0 libxxhash0)
for package in "$folder"/debs/*.deb; do
    dpkg-deb --extract "$package" "$folder/root"
done
cp "$folder/root/usr/bin/etcd" "$bin/etcd"

if [[ ! -d "$folder/source/kubernetes" ]]; then
    (cd "$folder/source" && apt-get source -qq --download-only kubernetes)
    dpkg-source --extract "$folder"/source/kubernetes_*.dsc "$folder/source/kubernetes" >/dev/null
fi
# the vendored reflect2 reads internal tables of Go and crashes since Go 1.18; Debian's newer version does not
reflect="vendor/github.com/modern-go/reflect2"
rm -rf "$folder/source/kubernetes/$reflect"
cp -r "$folder/root/usr/share/gocode/src/github.com/modern-go/reflect2" "$folder/source/kubernetes/$reflect"

# schemas of PyTorchJob: the models in Kubeflow's package, which are parsed and not imported, so without its requirements
"${PYTHON:-python3}" -m pip download --quiet --no-deps --dest "$folder/debs" kubeflow-training==1.9.4
"${PYTHON:-python3}" -m zipfile --extract "$folder"/debs/kubeflow_training-*.whl "$folder/kubeflow-training"

export PATH="$folder/root/usr/lib/go-1.19/bin:$folder/root/usr/bin:$PATH" GOMAXPROCS="${GOMAXPROCS:-1}"
libraries="$folder/root/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH)"
export LD_LIBRARY_PATH="$libraries" KUBE_GIT_VERSION="v1.20.2"
export KUBE_GIT_TREE_STATE="archive" KUBE_GIT_COMMIT="debian" KUBE_BUILD_PLATFORMS=""
nice -n 19 make --directory "$folder/source/kubernetes" all WHAT=cmd/kube-apiserver >"$folder/build.log" 2>&1 || {
    tail -n 20 "$folder/build.log" >&2
    exit 1
}
cp "$folder/source/kubernetes/_output/bin/kube-apiserver" "$bin/"
echo "kube-apiserver and etcd are in $bin"
