// Command conformance runs the conformance suite of the Gateway API inference extension, as its own test does, on
// gateways that somebody else has deployed.
package main

import (
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"sigs.k8s.io/gateway-api-inference-extension/conformance"
	"sigs.k8s.io/gateway-api-inference-extension/conformance/tests"
)

const (
	base    = "with-addresses/base.yaml"
	class   = "  gatewayClassName: \"{GATEWAY_CLASS_NAME}\"\n"
	address = "  addresses: [{type: Hostname, value: %s-istio.inference-conformance-infra.svc.cluster.local}]\n"
)

func main() {
	all := func(string, string) (bool, error) { return true, nil }
	testing.Main(all, []testing.InternalTest{{Name: "TestConformance", F: run}}, nil, nil)
}

// run gives each gateway of the suite's base the address of the Service that stands for its deployment.
func run(t *testing.T) {
	written, err := conformance.Manifests.ReadFile("resources/base.yaml")
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(string(written), class)
	names := []string{"conformance-primary", "conformance-secondary"}
	if len(parts) != len(names)+1 {
		t.Fatalf("the suite's base has %d gateways", len(parts)-1)
	}
	text := parts[0]
	for i, name := range names {
		text += class + fmt.Sprintf(address, name) + parts[i+1]
	}
	options := conformance.DefaultOptions(t)
	tests.RoundTripper.TimeoutConfig = options.TimeoutConfig // the suite leaves it at zero: one case would give up at once
	options.BaseManifests = base
	options.ManifestFS = append(options.ManifestFS, fs.FS(fstest.MapFS{base: {Data: []byte(text)}}))
	conformance.RunConformanceWithOptions(t, options)
}
