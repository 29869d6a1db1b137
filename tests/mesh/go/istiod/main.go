// Command istiod is Istio's control plane, in two forms.
//
// "istiod files" serves what is in one file of objects: its configuration generation, EnvoyFilter patches, Gateway API
// controller and xDS are Istio's own, and only the API server is not there. It starts in a fraction of a second.
// "istiod discovery" is Istio's own program, against an API server.
package main

import (
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"sigs.k8s.io/yaml"

	"istio.io/istio/pilot/cmd/pilot-discovery/app"
	"istio.io/istio/pilot/pkg/model"
	"istio.io/istio/pilot/test/xds"
	"istio.io/istio/pkg/config/mesh"
	"istio.io/istio/pkg/config/schema/gvr"
	"istio.io/istio/pkg/kube"
	"istio.io/istio/pkg/kube/kclient/clienttest"
	"istio.io/istio/pkg/log"
	"istio.io/istio/pkg/monitoring"
	"istio.io/istio/pkg/security"
	"istio.io/istio/pkg/test"
	"istio.io/istio/security/pkg/server/ca/authenticate"
)

func main() {
	if len(os.Args) < 2 || (os.Args[1] != "files" && os.Args[1] != "discovery") {
		fmt.Fprintln(os.Stderr, "usage: istiod files|discovery [FLAG ...]")
		os.Exit(2)
	}
	if os.Args[1] == "discovery" {
		log.EnableKlogWithCobra()
		if err := app.NewRootCommand().Execute(); err != nil {
			log.Error(err)
			os.Exit(1)
		}
		return
	}
	flags := flag.NewFlagSet("files", flag.ExitOnError)
	objects := flags.String("objects", "", "YAML file of Kubernetes' and Istio's objects")
	meshConfig := flags.String("mesh-config", "", "YAML file of a MeshConfig; empty: Istio's defaults")
	xdsAddress := flags.String("xds", "127.0.0.1:15010", "where xDS is served")
	httpAddress := flags.String("http", "127.0.0.1:15014", "where /debug, /metrics and POST /push are served")
	_ = flags.Parse(os.Args[2:])
	err := test.Wrap(func(t test.Failer) { serve(t, *objects, *meshConfig, *xdsAddress, *httpAddress) })
	if err != nil {
		fmt.Fprintln(os.Stderr, "istiod:", err)
		os.Exit(1)
	}
}

func serve(t test.Failer, objects, meshConfig, xdsAddress, httpAddress string) {
	// before the server's: some of its instruments are made when it starts
	exporter, err := monitoring.RegisterPrometheusExporter(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	istio, others := split(t, read(t, objects))
	config := mesh.DefaultMeshConfig()
	if meshConfig != "" {
		if config, err = mesh.ApplyMeshConfig(read(t, meshConfig), config); err != nil {
			t.Fatal(err)
		}
	}
	server := xds.NewFakeDiscoveryServer(t, xds.FakeOptions{
		ConfigString:               istio,
		KubernetesObjectString:     others,
		MeshConfig:                 config,
		DisableSecretAuthorization: true,
		ListenerBuilder:            func() (net.Listener, error) { return net.Listen("tcp", xdsAddress) },
		KubeClientModifier:         func(client kube.Client) { clienttest.MakeCRD(t, client, gvr.InferencePool) },
	})
	// who a proxy is, it says in a header: connections from this machine are believed
	server.Discovery.Authenticators = []security.Authenticator{authenticate.XfccAuthenticator{}}
	routes := http.NewServeMux()
	routes.Handle("/debug/", server.DiscoveryDebug)
	routes.Handle("/metrics", exporter)
	routes.HandleFunc("POST /push", func(http.ResponseWriter, *http.Request) {
		server.Discovery.ConfigUpdate(&model.PushRequest{Forced: true})
	})
	listener, err := net.Listen("tcp", httpAddress)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = http.Serve(listener, routes) }()
	fmt.Println("ready")
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGINT, syscall.SIGTERM)
	<-asked
}

func read(t test.Failer, path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// split returns Istio's objects and all others, each as one YAML stream.
func split(t test.Failer, text string) (istio string, others string) {
	var mine, theirs []string
	for _, document := range strings.Split(text, "\n---\n") {
		var head struct {
			APIVersion string `json:"apiVersion"`
		}
		if err := yaml.Unmarshal([]byte(document), &head); err != nil {
			t.Fatal(err)
		}
		group, _, _ := strings.Cut(head.APIVersion, "/")
		if strings.HasSuffix(group, ".istio.io") {
			mine = append(mine, document)
		} else if head.APIVersion != "" {
			theirs = append(theirs, document)
		}
	}
	return strings.Join(mine, "\n---\n"), strings.Join(theirs, "\n---\n")
}

