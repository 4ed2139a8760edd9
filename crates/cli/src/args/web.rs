//! The command line of `tidegate web` and `tidegate history`.

use std::net::SocketAddr;

use clap::Args;

#[derive(Debug, Args)]
pub struct WebArgs {
    /// Also serve at this address; may be given again
    ///
    /// Whoever reaches it can see all limits: any user of this host if it is a loopback address.
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Vec<SocketAddr>,
}

#[derive(Debug, Args)]
pub struct HistoryArgs {
    /// Name of the limit
    pub name: String,
    /// Print an SVG chart
    #[arg(long)]
    pub svg: bool,
    #[command(flatten)]
    pub look: super::LookArgs,
}
