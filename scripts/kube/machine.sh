# A node of Kubernetes in a virtual machine, for scripts/kube/node.sh, which reads this. kubelet and containerd are in the
# machine, and the control plane on this one. In `work` is the directory of the check, in `node` the node's name.

machine=$work/machine
share=$machine/share
disk=$machine/root
machine_pid=
# An emulated machine takes minutes to boot, and seconds for each order.
machine_limit=100m
boot_s=1200
order_s=700

# An image with what is in a directory.
image() {
	local name=$1 directory=$2 entrypoint=$3
	mkdir -p "$disk/var/lib/images"
	scripts/image.sh "$disk/var/lib/images/$name.tar" "docker.io/library/$name:1" amd64 "$directory" "$entrypoint"
}

make_images() {
	local files=$work/image name library
	mkdir -p "$files/usr/bin" "$files/tmp"
	ln -s usr/bin "$files/bin"
	cp "$(command -v busybox)" "$files/usr/bin/"
	for name in cat dd nc sh sleep; do
		ln -s busybox "$files/usr/bin/$name"
	done
	printf '#!/bin/sh\nexec sleep infinity\n' >"$files/usr/bin/pause"
	chmod 755 "$files/usr/bin/pause"
	image busybox "$files" /usr/bin/sh
	image pause "$files" /usr/bin/pause
	rm -r "$files"

	# The binary, and the libraries of one that is not static.
	install -D -m 755 "$disk/usr/local/bin/tidegate" "$files/usr/bin/tidegate"
	ldd "$tidegate" | grep -o '/[^ ]*' | while read -r library; do
		install -D -m 755 "$library" "$files$library"
	done
	image tidegate "$files" /usr/bin/tidegate
	rm -r "$files"
}

# The configuration of a node that is joined by hand.
configure_node() {
	local directory=$disk/etc/kubernetes url
	url=$(cat "$work/cluster/url")
	scripts/kube.sh certify "$work/cluster" node "/O=system:nodes/CN=system:node:$node" "DNS:$node"
	cp "$work"/cluster/{ca.crt,node.crt,node.key} "$directory/"
	echo "${url##*:}" >"$directory/port"
	cat >"$directory/kubeconfig" <<-END
		apiVersion: v1
		kind: Config
		current-context: it
		contexts: [{ name: it, context: { cluster: it, user: it } }]
		clusters:
		  - name: it
		    cluster:
		      server: "https://10.0.2.2:${url##*:}"
		      tls-server-name: 127.0.0.1
		      certificate-authority: /etc/kubernetes/ca.crt
		users:
		  - { name: it, user: { client-certificate: /etc/kubernetes/node.crt, client-key: /etc/kubernetes/node.key } }
	END
	cat >"$directory/kubelet.yaml" <<-END
		apiVersion: kubelet.config.k8s.io/v1beta1
		kind: KubeletConfiguration
		cgroupDriver: systemd
		containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
		authentication: { anonymous: { enabled: false }, x509: { clientCAFile: /etc/kubernetes/ca.crt } }
		# A ConfigMap that has changed is seen then.
		syncFrequency: 10s
		# In an emulated machine the runtime is slow.
		runtimeRequestTimeout: 10m
		imageGCHighThresholdPercent: 100
		evictionHard: { memory.available: 1Mi }
	END
	cat >"$disk/etc/systemd/system/kubelet.service" <<-END
		[Service]
		Environment=GOGC=400
		ExecStart=/usr/local/bin/kubelet --config /etc/kubernetes/kubelet.yaml --kubeconfig /etc/kubernetes/kubeconfig \\
			--hostname-override $node --node-ip 10.0.2.15 --housekeeping-interval 60s
		Restart=always
	END
	cat >"$disk/etc/containerd/config.toml" <<-END
		version = 2
		[plugins."io.containerd.grpc.v1.cri"]
		sandbox_image = "docker.io/library/pause:1"
		[plugins."io.containerd.grpc.v1.cri".cni]
		bin_dir = "/usr/lib/cni"
		conf_dir = "/etc/cni/net.d"
		[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
		runtime_type = "io.containerd.runc.v2"
		[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
		SystemdCgroup = true
	END
}

# Pods are on a bridge. Each packet of theirs is one on the wire, so that the bytes of an interface and of a limit can be
# compared: the last plugin of the chain sees to that.
configure_network() {
	cat >"$disk/etc/cni/net.d/10-pods.conflist" <<-END
		{ "cniVersion": "1.0.0", "name": "pods", "plugins": [
			{ "type": "bridge", "bridge": "cni0", "isGateway": true, "ipam": { "type": "host-local",
				"ranges": [[{ "subnet": "10.88.0.0/16" }]], "routes": [{ "dst": "0.0.0.0/0" }] } },
			{ "type": "one-segment" }
		] }
	END
	mkdir -p "$disk/usr/lib/cni"
	cat >"$disk/usr/lib/cni/one-segment" <<-'END'
		#!/bin/sh
		[ "$CNI_COMMAND" = ADD ] || exit 0
		nsenter --net="$CNI_NETNS" ip link set "$CNI_IFNAME" gso_max_segs 1 >&2 || exit 1
		exec jq .prevResult
	END
	chmod 755 "$disk/usr/lib/cni/one-segment"
}

start_machine() {
	mkdir -p "$share" "$disk"/{usr/local/bin,etc/kubernetes,etc/containerd,etc/cni/net.d,etc/systemd/system}
	cp "$(command -v kubelet)" "$disk/usr/local/bin/"
	strip -o "$disk/usr/local/bin/tidegate" "$tidegate"
	make_images
	configure_node
	configure_network
	cp scripts/kube/on-node.sh "$share/main.sh"
	scripts/bounded.sh "$machine_limit" scripts/vm.sh node "$machine" >"$work/machine.log" 2>&1 </dev/null &
	machine_pid=$!
	until_there "$share/up" "$boot_s"
}

# Waits for a file of the machine.
until_there() {
	local end=$((SECONDS + $2))
	until [ -e "$1" ]; do
		if ((SECONDS > end)) || ! kill -0 "$machine_pid" 2>/dev/null; then
			return 1
		fi
		sleep 0.1
	done
}

# Ends the machine.
stop_machine() {
	[ -n "$machine_pid" ] || return 0
	touch "$share/end"
	timeout 60 tail --follow /dev/null --pid "$machine_pid" || kill "$machine_pid" || true
	wait "$machine_pid" || true
}

# Does something on the node: a line for bash, with the functions of on-node.sh.
on_node() {
	rm -f "$share/code"
	echo "$*" >"$share/order-new"
	mv "$share/order-new" "$share/order"
	until_there "$share/code" "$order_s" || {
		echo "the node did not do in time: $*"
		return 1
	}
	cat "$share/errors" >&2
	cat "$share/answer"
	return "$(cat "$share/code")"
}
