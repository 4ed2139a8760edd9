//! Addresses of peers: a DNS name, a Redis, an etcd.

pub mod url;
