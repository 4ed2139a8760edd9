#!/usr/bin/env bash
# Makes an image for containers: a layout of OCI in a tar file, the same each time that it is made of the same files.
#
#   scripts/image.sh FILE NAME:TAG ARCH DIR ENTRYPOINT
#
# ARCH is as Debian and Docker call it. DIR has the files, and SOURCE_DATE_EPOCH is their time.
set -euo pipefail
out=$1 name=$2 files=$4 entrypoint=$5
platform="\"architecture\":\"$3\",\"os\":\"linux\""
epoch=${SOURCE_DATE_EPOCH:-$(date +%s)}
image=$(mktemp --directory)
trap 'rm -rf "$image"' EXIT

pack() {
	tar --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner --format=posix \
		--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime --create "$@"
}

# Moves a file to the blobs, and prints its descriptor, but for the last brace.
blob() {
	local file=$1 type=$2 sum size
	sum=$(sha256sum "$file" | cut -d ' ' -f 1)
	size=$(stat --format=%s "$file")
	mv "$file" "$image/blobs/sha256/$sum"
	printf '{"mediaType":"application/vnd.oci.image.%s","digest":"sha256:%s","size":%s' "$type" "$sum" "$size"
}

mkdir -p "$image/blobs/sha256"
(cd "$files" && pack --file "$image/layer" -- *)
diff=$(sha256sum "$image/layer" | cut -d ' ' -f 1)
gzip --no-name --best "$image/layer"
layer="$(blob "$image/layer.gz" layer.v1.tar+gzip)}"
cat >"$image/config" <<-END
	{$platform,"created":"$(date --utc --date="@$epoch" +%Y-%m-%dT%H:%M:%SZ)",
	"config":{"Entrypoint":["$entrypoint"],"Env":["PATH=/usr/bin"],
	"Labels":{"org.opencontainers.image.title":"${name%:*}","org.opencontainers.image.version":"${name##*:}"}},
	"rootfs":{"type":"layers","diff_ids":["sha256:$diff"]}}
	END
config="$(blob "$image/config" config.v1+json)}"
echo "{\"schemaVersion\":2,\"mediaType\":\"application/vnd.oci.image.manifest.v1+json\"," \
	"\"config\":$config,\"layers\":[$layer]}" >"$image/manifest"
manifest="$(blob "$image/manifest" manifest.v1+json),\"platform\":{$platform},"
manifest+="\"annotations\":{\"org.opencontainers.image.ref.name\":\"$name\"}}"
echo "{\"schemaVersion\":2,\"manifests\":[$manifest]}" >"$image/index.json"
echo '{"imageLayoutVersion":"1.0.0"}' >"$image/oci-layout"
pack --file "$out" --directory "$image" blobs index.json oci-layout
